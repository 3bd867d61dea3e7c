"""Models over HTTP, as OpenAI's clients ask for them."""
