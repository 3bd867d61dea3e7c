"""GGUF files with the exact geometry and mixture of published models, random weights and a real vocabulary.

    python -m bench.whole_size NAME OUT.gguf --vocabulary VOCABULARY.gguf

Random weights take the time that trained ones take. Their routing would be their own, so it is written into the file:
`routing.py` draws a synthetic trace, and chooses the embedding, the routers and the output matrix so that the model
follows that trace and writes the same text in every engine. Sizes are those of the published files; texts are nonsense.
"""
