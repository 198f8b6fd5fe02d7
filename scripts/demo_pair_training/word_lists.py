"""The words that prompts are made of.

An entry may carry its keyword after a bar, `learning to swim|swimming`: the word that a faithful
reply must mention. Without a bar the keyword is the last word of the entry. The held-out lists
share no entry, and no keyword, with the training lists.
"""


def _split(text: str) -> tuple[str, ...]:
    """The comma-separated entries of a block of text."""
    return tuple(" ".join(entry.split()) for entry in text.split(",") if entry.strip())


_ANIMALS = _split("""
    cat, dog, fox, rabbit, bear, owl, mouse, turtle, frog, duck, horse, lion, elephant, penguin,
    squirrel, bee, whale, hedgehog, wolf, goat, pig, cow, sheep, donkey, chicken, rooster, goose,
    swan, eagle, parrot, pigeon, robin, peacock, flamingo, tiger, leopard, panda, koala, kangaroo,
    monkey, gorilla, giraffe, zebra, camel, deer, moose, rat, hamster, bat, mole, beaver, skunk,
    lizard, snake, crocodile, toad, snail, spider, ant, butterfly, ladybug, cricket, crab, lobster,
    octopus, dolphin, shark, seal, seahorse, starfish, salmon, goldfish, puppy, kitten, pony, lamb
""")

_PEOPLE = _split("""
    farmer, baker, fisherman, teacher, painter, gardener, sailor, shepherd, clockmaker, singer,
    doctor, nurse, firefighter, pilot, cook, tailor, carpenter, blacksmith, miller, hunter,
    postman, bus driver, dancer, writer, poet, musician, inventor, scientist, student, soldier,
    judge, shopkeeper, shoemaker, weaver, potter, miner, barber, clown, magician, explorer,
    astronaut, captain, grandmother, grandfather, traveler
""")

_FANTASY = _split("""
    dragon, robot, wizard, knight, princess, prince, king, queen, pirate, witch, fairy, giant,
    dwarf, elf, mermaid, unicorn, ghost, troll, genie, snowman
""")

_CHILDREN = _split("""
    girl named Lily, girl named Mia, girl named Anna, girl named Emma, girl named Rosa,
    girl named Zoe, girl named Lucy, girl named Nora, girl named Ella, girl named Clara,
    boy named Tom, boy named Ben, boy named Sam, boy named Leo, boy named Jack, boy named Oscar,
    boy named Henry, boy named Peter, boy named Noah, boy named Daniel
""")

HEROES = _ANIMALS + _PEOPLE + _FANTASY + _CHILDREN

HELD_HEROES = _split("""
    otter, crow, raccoon, hippo, librarian, plumber, detective, vampire, boy named Max,
    girl named Ruby
""")

ADJECTIVES = _split("""
    little, brave, shy, lonely, curious, clever, kind, lazy, happy, sad, tiny, old, young, hungry,
    sleepy, friendly, grumpy, cheerful, quiet, proud
""")

PLACES = _split("""
    in a dark forest, in a small village, by the sea, in a big city, on a farm, in a castle,
    on a mountain, in a garden, near a river, in the snow, in a desert, on an island, in a school,
    in an old house, under a bridge, in a market, on a ship, in a valley, at the beach,
    in the jungle
""")

GOALS = _split("""
    finds a lost key, makes a new friend, learns to swim, wants to fly, helps a stranger,
    looks for treasure, is afraid of the dark, loses a favorite toy, saves the day, bakes a cake,
    gets lost in the rain, learns to share, meets a talking tree, finds a magic stone,
    builds a boat, plants a seed, wins a race, tells a lie, hears a strange sound,
    discovers a secret door, wants to see the moon, breaks a window, finds a letter,
    sings a song, cannot sleep
""")

TOPICS = _split("""
    the sun, the moon, rain, snow, the wind, clouds, rainbows, thunder, fog, hail, hurricanes,
    tornadoes, volcanoes, earthquakes, floods, oceans, rivers, lakes, waterfalls, mountains,
    valleys, caves, deserts, forests, the rainforest, islands, beaches, glaciers, gravity, magnets,
    electricity, light, shadows, sound, echoes, heat, energy, atoms, water, ice, steam, air,
    oxygen, fire, iron, gold, silver, diamonds, glass, plastic, paper, wood, rubber, cotton, wool,
    silk, salt, sugar, bread, butter, milk, cheese, eggs, chocolate, coffee, tea, honey, rice,
    corn, wheat, pasta, pizza, soup, apples, bananas, oranges, grapes, strawberries, tomatoes,
    potatoes, carrots, onions, nuts, mushrooms, trees, flowers, roses, seeds, leaves, roots,
    grass, cactus plants|cactus, bees, butterflies, ants, spiders, worms, birds, owls, eagles,
    chickens, fish, sharks, whales, dolphins, octopuses, dogs, cats, rabbits, horses, cows, sheep,
    pigs, elephants, lions, tigers, giraffes, monkeys, wolves, bears, camels, snakes, turtles,
    frogs, crocodiles, dinosaurs, fossils, the heart, the brain, the lungs, bones, muscles, blood,
    the skin, teeth, the eyes, the ears, the nose, sleep, dreams, laughter|laugh, exercise,
    healthy food|food, vitamins, germs, medicine, doctors, hospitals, schools, books, museums,
    music, painting, dancing, drums, violins, movies, poems, sports, football, basketball, tennis,
    swimming, chess, puzzles, kites, money, banks, jobs, markets, cities, villages, farms, bridges,
    roads, tunnels, castles, cars, trains, ships, airplanes, balloons, bicycles, wheels, rockets,
    satellites, astronauts, stars, planets, Mars, Saturn, comets, the Milky Way|Milky Way, black
    holes|black hole, computers, the internet, robots, phones, cameras, television, radios, clocks,
    maps, compasses, telescopes, microscopes, batteries, engines, solar power|solar, wind
    turbines|turbine, recycling, pollution, the climate, the seasons, spring, winter, day and
    night|night, calendars, numbers, addition, fractions, triangles, circles, letters, languages,
    friendship, kindness, honesty, courage, patience, sharing, families, holidays, birthdays
""")

HELD_TOPICS = _split("""
    lightning, tides, submarines, lemons, the stomach, zippers, teamwork, printers, penicillin,
    avalanches, pyramids, bamboo, trumpets, gratitude, helicopters
""")

ACTIVITIES = _split("""
    learning a new language|language, sleeping better|sleep, saving money, cooking pasta, baking
    bread, baking cookies, growing tomatoes, growing herbs, growing roses, cleaning a kitchen,
    cleaning windows, writing a letter, writing a story, writing a poem, making friends, studying
    for a test|test, running faster|running, staying healthy, reading more books, taking good
    photos, training a dog, caring for a cat, caring for a horse, feeding birds, playing the piano,
    learning guitar, playing the violin, singing a song|sing, drawing animals|draw, drawing faces,
    painting a room|paint, painting with watercolors|paint, packing for a trip|pack, camping in the
    woods|camp, riding a bike, riding a horse, driving in the rain, speaking in public|speak,
    waking up early|early, eating more vegetables, eating less sugar, drinking more water, managing
    time, staying calm, staying warm in winter|warm, being a good friend, being a good
    listener|listen, being patient, planning a party, planning a picnic, planting a garden,
    planting a tree, making a budget, finding a job, learning math, doing homework, fixing a bike,
    washing clothes, washing a car, folding paper planes, saving energy, recycling at
    home|recycle, protecting the environment, walking every day|walk, learning to swim|swimming,
    learning to dance, making tea, making soup, making a salad, making pancakes, building a
    sandcastle, flying a kite, hiking in the mountains|hike, visiting a new city, catching a
    fish, playing football
""")

HELD_ACTIVITIES = _split("""
    making jam at home|jam, learning origami, juggling three balls|juggling, moving to a new
    apartment, keeping a diary, sewing a button, growing mint, making lemonade
""")

OBJECTS = _split("""
    a sunset, a busy street, a quiet lake, an old tree, a warm kitchen, a rainy day|rain, a summer
    morning, a winter night, a small shop, a garden in spring|garden, a train station|train,
    a beach, a birthday party|birthday, a mountain path|mountain, a farm, a school, a storm at
    sea|storm, a starry sky|sky, a cozy bedroom, a country road, a river, a forest in
    autumn|forest, a snowy field|snow, an old castle, a toy store, a bakery, a playground,
    a small village, a ship at sea|ship, a campfire, a full moon, a flower market|flower
""")

HELD_OBJECTS = _split("""
    a lighthouse, a carousel, an orchard, an aquarium
""")
