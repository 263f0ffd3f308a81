"""What ADD answers for an attachment, in a form that no CNI version owns. Pure; `cni.result` writes each version."""
