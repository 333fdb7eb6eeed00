"""The OpenAI API: endpoints, and what they need between HTTP and the engine."""
