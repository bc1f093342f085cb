"""The vision wing: models that see images, from reading them to the towers and the layers behind them."""
