"""Documents of the store: which kinds there are, what they may say, and what is wrong with one."""
