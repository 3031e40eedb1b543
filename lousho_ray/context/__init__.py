"""What a model gets to see of a conversation. Compaction keeps a long one under the model's context window."""
