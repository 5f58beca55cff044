"""Tools around the product. Nothing that `serve`, `node` or `render` runs imports them."""
