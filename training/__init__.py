"""How the demonstration model of `smoe` was made: data, tokenizer, training, export, scores."""
