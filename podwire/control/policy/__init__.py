"""Policy: from documents to who may talk to whom, and to the entries that programs look up."""
