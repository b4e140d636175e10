"""Who owns which bytes: page pool, arena, block tables, adapter store."""
