"""Decoding: few query rows and many keys, which are split over programs and merged; contiguous and from pages."""
