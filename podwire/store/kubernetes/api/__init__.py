"""The API server: how it is reached, what is shown to it, what is asked and what refusals mean."""
