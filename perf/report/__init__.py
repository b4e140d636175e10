"""Results for people: tables, and goals that results are compared with."""
