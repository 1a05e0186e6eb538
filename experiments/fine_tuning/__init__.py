"""Private fine-tuning of a pretrained sentence encoder: head only, LoRA and all weights."""
