"""Rights and bounds of clients: keys, hosts, addresses and limits."""
