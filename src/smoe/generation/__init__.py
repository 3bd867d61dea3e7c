"""From prompts to text."""
