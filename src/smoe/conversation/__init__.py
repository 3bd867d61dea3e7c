"""From a conversation to a prompt's tokens, by the model's chat template, within bounds of time and memory."""
