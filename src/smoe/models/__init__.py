"""Model families, checkpoints and tokenizers. transformers builds the model without its experts; smoe loads these when
a token needs them."""
