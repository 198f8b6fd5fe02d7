"""Words that teach copying: prompts about things that the teacher's text hardly names.

Rare words and invented ones; none of them is a held-out word (a test compares the lists). The
`CHOOSE_*` words are kept from all training too: settings are chosen on them, so that the held-out
words stay for the last measurement.
"""

import random

from .word_lists import HELD_ACTIVITIES, HELD_HEROES, HELD_OBJECTS, HELD_TOPICS, _split

RARE_ANIMALS = _split("""
    badger, heron, marmot, weasel, lynx, moth, beetle, gecko, llama, alpaca, ostrich, pelican,
    sparrow, finch, hawk, falcon, vulture, stork, jackal, hyena, cheetah, jaguar, panther, walrus,
    manatee, narwhal, shrimp, clam, oyster, squid, jellyfish, eel, trout, carp, salamander, newt,
    iguana, chameleon, armadillo, sloth, porcupine, ferret, mink, bison, buffalo, yak, antelope,
    gazelle, mule, hare, gopher, chipmunk, vole, shrew, wombat, platypus, emu, toucan, macaw,
    canary, hummingbird, woodpecker, magpie, wasp, dragonfly, firefly, caterpillar, grasshopper,
    centipede, scorpion, tortoise, puma, coyote, meerkat, lemur, baboon, walleye, turkey, quail
""")

RARE_PEOPLE = _split("""
    mechanic, dentist, butcher, florist, jeweler, banker, lawyer, mayor, lifeguard, athlete,
    drummer, violinist, photographer, journalist, chemist, surgeon, janitor, waiter, beekeeper,
    lumberjack, goldsmith, locksmith, puppeteer, acrobat, monk, bishop, duke, duchess, emperor,
    viking, samurai, goblin, gnome, ogre, phoenix, centaur, werewolf, zombie, alien, mummy,
    merchant, peddler, sculptor, composer, conductor, referee, gymnast, swimmer, cyclist, tourist
""")

RARE_NAMES = _split("""
    Felix, Hugo, Ivan, Omar, Kofi, Ravi, Luca, Ezra, Finn, Theo, Boris, Dario, Emil, Gus, Igor,
    Ada, Iris, Maya, Nina, Olga, Priya, Sara, Tess, Uma, Wren, Yara, Hazel, Ivy, Jade, Dora
""")

RARE_TOPICS = _split("""
    cinnamon, pepper, garlic, vinegar, lentils, peas, cherries, peaches, plums, mangoes,
    pineapples, coconuts, walnuts, almonds, cucumbers, pumpkins, spinach, cabbage, lettuce, celery,
    copper, zinc, nickel, helium, hydrogen, nitrogen, carbon, chalk, clay, marble, granite,
    limestone, leather, velvet, linen, candles, mirrors, hammers, scissors, needles, ladders,
    umbrellas, backpacks, pillows, blankets, elevators, tractors, motorcycles, scooters, canoes,
    parachutes, sailboats, drones, lasers, pianos, flutes, harps, cellos, opera, ballet, theater,
    sculpture, pottery, karate, boxing, hockey, golf, volleyball, surfing, skiing, algebra,
    geometry, percentages, democracy, taxes, swamps, canyons, geysers, monsoons, blizzards,
    eclipses, meteors, galaxies, kidneys, the liver, the tongue, squirrels, penguins, lobsters
""")

RARE_ACTIVITIES = _split("""
    knitting scarves, carving wood, baking muffins, roasting coffee, folding laundry, painting
    fences, growing lettuce, growing pumpkins, polishing shoes, repairing clocks, building
    shelves, catching butterflies, collecting stamps, collecting coins, watching birds, making
    candles, making soap, making cheese, making bracelets, drawing maps, reading maps, playing
    chess, playing hockey, learning karate, learning algebra, caring for a hamster, training a
    parrot, sharpening knives, mopping floors, peeling potatoes
""")

RARE_OBJECTS = _split("""
    a windmill, a vineyard, a greenhouse, a harbor, a barn, a cathedral, a subway, a swamp,
    a meadow, a canyon, a museum, a palace, a volcano, a waterfall, a glacier, a jungle
""")

CHOOSE_HEROES = _split("""
    gull, possum, stoat, swordfish, mailman, ranger, optician, sorcerer, boy named Carl,
    girl named Pia
""")

CHOOSE_TOPICS = _split("""
    sandstorms, currents, ferries, cranberries, the spine, buttonholes, loyalty, scanners, aspirin,
    landslides, obelisks, willows, clarinets, generosity, gliders
""")

CHOOSE_ACTIVITIES = _split("""
    making jelly, learning calligraphy, balancing plates, furnishing a cottage, sewing a pocket,
    growing basil
""")

CHOOSE_OBJECTS = _split("""
    a tower, a fountain, a hedge maze, a planetarium
""")

_ONSETS = ("b", "br", "c", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "pl")
_ONSETS += ("qu", "r", "s", "sk", "sn", "t", "tr", "v", "w", "y", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ee", "oo")
_MIDDLES = ("b", "d", "g", "l", "lm", "m", "n", "nd", "r", "rk", "rv", "t", "v", "x", "z")
_ENDS = ("ck", "l", "m", "n", "nk", "p", "rd", "rn", "t", "x", "zel", "bin", "dle", "mon")


_HELD_TEXT = " ".join(HELD_HEROES + HELD_TOPICS + HELD_ACTIVITIES + HELD_OBJECTS).lower()


def invented_word(rng: random.Random) -> str:
    """A pronounceable word of two or three syllables, and no held-out word nor part of one."""
    while True:
        middle = rng.choice(_VOWELS) + rng.choice(_MIDDLES)
        if rng.random() < 0.3:
            middle += rng.choice(_VOWELS) + rng.choice(_MIDDLES)
        word = rng.choice(_ONSETS) + middle + rng.choice(_VOWELS[:5]) + rng.choice(_ENDS)
        if word not in _HELD_TEXT:
            return word
