"""The page pool and its users: arena, layouts, block tables, prefix cache, eviction."""
