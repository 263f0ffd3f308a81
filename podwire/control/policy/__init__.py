"""Policy: from documents to what pods may talk to, and to the entries that programs look up."""
