"""The wing of mixtures of experts: routers, expert parallelism, and the attention of the models that have them."""
