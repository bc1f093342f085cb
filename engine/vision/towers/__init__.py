"""Vision towers and what joins them to a decoder: plain modules that turn patches into rows of the residual stream."""
