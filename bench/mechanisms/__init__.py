"""The mechanisms of a paper, measured one after the other: what `smoe bench --ablation` does."""
