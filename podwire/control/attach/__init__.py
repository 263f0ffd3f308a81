"""One attachment: what ADD does step by step, and the one undo of each step."""
