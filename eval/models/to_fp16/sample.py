"""The built-in text on which peaks are measured: prose, figures, code and other languages."""

TEXT = """The harbour of the old town lies on the north side of a narrow bay. In winter the wind comes from the sea,
and fishermen wait for days before they can leave. A lighthouse was built on the rock at the entrance in 1871; its lamp
was first fed with oil, then with gas, and since 1934 with electric current. The keeper wrote down the weather twice a
day, and his books are still read by people who study how the climate has changed.

Question: a train leaves at 14:35 and travels 210 km at 84 km/h. When does it arrive?
Answer: 210 / 84 = 2.5 hours, so it arrives at 17:05.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)

Water boils at 100 degrees Celsius at sea level, and at 71 degrees on the highest mountain, because the pressure of the
air is lower there. The same law explains why bread rises faster in the hills.

Der Zug hatte wieder Verspätung. La bibliothèque ferme à dix-huit heures. 今天的天气很好。 El río crece en abril.

- item: bolts, M8 x 40; price: $0.27; in stock: 1,250
- item: washers, 8.4 mm; price: $0.04; in stock: 9,800

"Nobody will believe us," she said, and closed the window; but the next morning the whole street talked of it.
"""
