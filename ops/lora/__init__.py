"""What adapters add: SGMV over many adapters in one launch, vectors of outputs, own rows of embeddings, merging."""
