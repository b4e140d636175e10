"""The page pool and what lives in its pages: arena, layouts, block tables, prefix cache, eviction."""
