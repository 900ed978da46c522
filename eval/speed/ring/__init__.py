"""Attention over several devices: is it as exact as one device, and what does it cost each of them?"""
