"""Fast per-example clipping: a Transformer on IMDB."""
