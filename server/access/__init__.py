"""Access control and limits of clients: keys, hosts, addresses and request limits."""
