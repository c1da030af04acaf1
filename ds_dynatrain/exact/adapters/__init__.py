"""DeepSpeed's engines, adding gradients leaf by leaf."""
