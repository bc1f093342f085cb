"""Bytes of tensors on their way from stored files into others: contents, the threads that write them, the disk."""
