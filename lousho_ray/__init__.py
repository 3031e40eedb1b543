"""lousho_ray: an actor-model runtime on Ray for LLM agents."""
