"""Model families, checkpoints and tokenizers. transformers builds the model without its experts; smoe loads an expert
when a token needs it."""
