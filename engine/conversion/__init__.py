"""Between formats: Hugging Face models, PEFT adapters and partitioned bases, merged, exported and proved."""
