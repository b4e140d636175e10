"""RecurrentGemma: how its configuration is read, and its linear recurrent units."""
