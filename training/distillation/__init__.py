"""Knowledge distillation: tokenizer alignment, teacher, student initialization and losses."""
