"""The optimizer: flat fp32 buffers, gradient reduction, clipping, AdamW and learning-rate schedules."""
