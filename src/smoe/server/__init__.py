"""An HTTP server for one model, with OpenAI's API."""
