"""What this machine has: its memory, disk and processor, measured."""
