"""Services: the addresses that pods ask, and the back ends that answer."""
