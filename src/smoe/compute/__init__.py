"""The arithmetic of experts, wherever it is carried out."""
