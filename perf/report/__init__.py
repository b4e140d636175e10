"""Results for people: tables, and the marks that they are held against."""
