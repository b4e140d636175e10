"""JetMoE: how its configuration is read, and its layers."""
