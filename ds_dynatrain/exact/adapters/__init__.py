"""DeepSpeed's engines with gradients that are added leaf by leaf."""
