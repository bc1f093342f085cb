"""Images in adopted models: transformers' processor makes the inputs, transformers' own forward places the features."""
