"""The API's door: HTTP on a unix socket, one module per noun."""
