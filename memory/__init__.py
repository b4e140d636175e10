"""Memory and its owners: page pool, arena, block tables, adapter store."""
