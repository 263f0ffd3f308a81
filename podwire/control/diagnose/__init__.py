"""What doctor, status and CNI STATUS look at."""
