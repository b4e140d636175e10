"""JetMoE: a mixture of attention heads, and one of feed-forward experts."""
