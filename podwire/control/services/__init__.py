"""Services: what pods ask for, and who answers."""
