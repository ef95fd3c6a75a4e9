"""What a pipeline has done, measured: traces, and what is made of them."""
