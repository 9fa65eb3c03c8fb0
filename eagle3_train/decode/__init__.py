"""Lossless speculative decoding with the real target model."""
