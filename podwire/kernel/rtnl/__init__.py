"""Route netlink: pure builders of requests and readers of answers, for links, addresses, routes and queues."""
